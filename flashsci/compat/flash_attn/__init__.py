"""flash_attn's functions, computed by flashsci: by name, or for unchanged code that imports flash_attn.

from flashsci.compat import flash_attn

flash_attn.install()  # before anything imports flash_attn
from flash_attn import flash_attn_func  # flashsci's
"""

from flashsci.compat.flash_attn.fa2 import (
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
    flash_attn_with_kvcache,
)
from flashsci.compat.flash_attn.stand_in import install, uninstall

__all__ = [
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
    "install",
    "uninstall",
]
