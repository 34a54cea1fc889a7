"""Rendezvous: how processes that know one URL, or nothing, become ranks with a common store."""

from tilework.rendezvous.environment import Settings, detect_environment, is_torchelastic_launched
from tilework.rendezvous.handlers import Handler, register_rendezvous_handler, rendezvous

__all__ = [
    "Handler",
    "Settings",
    "detect_environment",
    "is_torchelastic_launched",
    "register_rendezvous_handler",
    "rendezvous",
]
