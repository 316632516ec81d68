"""What plans, exchanges and sharded modules share: ranks, tables, groups, orders, agreement."""

from tutorec._lazy import lazy_package

__getattr__, __dir__ = lazy_package(__name__)
