"""The gateway: settings, rights and routes."""
