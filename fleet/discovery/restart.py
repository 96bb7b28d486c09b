"""Restarting a replica by deleting its pod: its StatefulSet or Deployment makes another one.

An effect that somebody else decides on. It needs the right to delete pods.
"""

from __future__ import annotations

from fleet.discovery.api import ApiFailed, ApiServer, sent
from fleet.discovery.pods import pod_uid
from fleet.errors import NotAllowed, Refused, Unavailable
from fleet.facts.replica import Replica

OUR_FAULT = frozenset({401, 403})
GONE_ALREADY = frozenset({404, 409})
"""No such pod, or another one has its name by now (the precondition on its uid)."""


class PodRestart:
    """Deletes pods of one namespace; the grace period is the pod's own."""

    def __init__(self, api: ApiServer, namespace: str) -> None:
        self._api = api
        self._namespace = namespace

    async def restart(self, replica: Replica) -> None:
        """Delete the very pod that this replica is; a pod that is gone already is fine.

        Raises Refused for a replica that is no pod, NotAllowed without the right to do it, and
        Unavailable, which may be retried, if the API server does not answer.
        """
        origin = replica.origin
        if origin is None or not origin.name:
            raise Refused(
                f"{replica.id} is no pod that discovery has found", hint="restart it by hand"
            )
        path = f"/api/v1/namespaces/{self._namespace}/pods/{origin.name}"
        body = {"kind": "DeleteOptions", "apiVersion": "v1"}
        options = {**body, "preconditions": {"uid": pod_uid(origin)}}
        try:
            async with self._api.client() as client:
                await sent(client, "DELETE", path, options)
        except ApiFailed as error:
            _raise_as_ours(error, origin.name)


def _raise_as_ours(error: ApiFailed, pod: str) -> None:
    if error.code in GONE_ALREADY:
        return
    if error.code in OUR_FAULT:
        raise NotAllowed(
            f"the gateway may not delete pod {pod} ({error})",
            hint="grant its service account delete on pods, then try again",
        ) from error
    raise Unavailable(f"pod {pod} was not deleted: {error}") from error
