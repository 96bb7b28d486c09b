"""From settings to what finds replicas, and to what restarts them. Wiring only.

Inside a pod, the kubelet's environment and files fill in what the settings leave open.
"""

from __future__ import annotations

import os

from fleet.discovery.api import ApiServer, api_server, own_namespace
from fleet.discovery.base import Source
from fleet.discovery.dns import NameSource
from fleet.discovery.kubernetes import PodSource
from fleet.discovery.restart import PodRestart
from fleet.replicas.restart import CommandRestart, HookRestart, Restart
from gateway.settings import SettingsError
from gateway.settings_model import DiscoveryKind, Settings


def source_of(settings: Settings) -> Source | None:
    """Return where replicas come from besides the list in the settings; None if from nowhere.

    Raises SettingsError if this should run in a pod and does not.
    """
    if settings.discovery is DiscoveryKind.DNS:
        dns = settings.dns
        return NameSource(dns.host or "", dns.port, dns.interval_s)
    if settings.discovery is DiscoveryKind.KUBERNETES:
        api, namespace = _cluster(settings)
        found = settings.kubernetes
        return PodSource(api, namespace, found.selector or "", found.port)
    return None


def restart_of(settings: Settings) -> Restart | None:
    """Return what has a replica restarted: the operator's hook, or deleting its pod; or None."""
    hook = settings.restart
    if hook.command is not None:
        return CommandRestart(hook.command, hook.timeout_s)
    if hook.webhook is not None:
        return HookRestart(hook.webhook, hook.timeout_s)
    is_on = settings.discovery is DiscoveryKind.KUBERNETES and settings.kubernetes.restart
    return PodRestart(*_cluster(settings)) if is_on else None


def _cluster(settings: Settings) -> tuple[ApiServer, str]:
    try:
        api = api_server(settings.kubernetes.api, os.environ)
        return api, settings.kubernetes.namespace or own_namespace()
    except ValueError as error:
        raise SettingsError(f"FLEET_DISCOVERY: {error}") from None
