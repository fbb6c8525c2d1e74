"""Process groups for a PrivateUse1 device without collectives of its own: they copy through the host, to gloo.

torch's OpenReg is such a device: the collectives of its backend ``occl`` return at once and move no data. Its tensors
have no storages that can be resized either, which ``fully_shard`` needs to free what it has gathered.

torch calls :func:`load` at the end of ``import torch``, by the entry point ``torch.backends`` of this package.
"""

import importlib
import importlib.util

#: The package of the device. Its entry point may come after ours.
DEVICE_PACKAGE = "torch_openreg"


def load() -> None:
    """Import the device, and register process groups for it; without the device there is nothing to do."""
    if importlib.util.find_spec(DEVICE_PACKAGE) is None:
        return
    importlib.import_module(DEVICE_PACKAGE)

    from through_host import collectives, module, storages

    for one in (collectives, module, storages):
        one.register()
