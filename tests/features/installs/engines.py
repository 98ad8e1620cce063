"""An engine, as its handle sees it: one that installs versions."""

import torch


def engine(opened, name="engine", **options):
    return opened(name, installs=True, **options)


def install(handle, version):
    with handle.installing(version) as ref:
        handle.read(ref.version, {"w": torch.empty(4)})
    return ref
