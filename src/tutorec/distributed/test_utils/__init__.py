"""What programs that test models on several ranks import under TorchRec's names."""

from tutorec._lazy import lazy_package

__getattr__, __dir__ = lazy_package(__name__)
