"""Build the extension against the torch that is installed."""

from setuptools import setup
from torch.utils.cpp_extension import BuildExtension, CppExtension

setup(
    ext_modules=[CppExtension("through_host._storages", ["through_host/storages.cpp"])],
    cmdclass={"build_ext": BuildExtension.with_options(use_ninja=False)},
)
