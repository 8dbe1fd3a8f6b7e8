"""Builds the native modules with cffi; everything else stands in pyproject.toml."""

from setuptools import setup

setup(
    options={
        "bdist_wheel": {"py_limited_api": "cp311"}
    },  # the modules use the stable ABI: one wheel for 3.11 and newer
    cffi_modules=[
        "transport/build_ucx.py:ffi",
        "tiers/build_host.py:ffi",
        "tiers/build_io.py:ffi",
        "ucxkv/directory/build_slots.py:ffi",
    ],
)
