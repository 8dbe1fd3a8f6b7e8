"""Builds the native modules with cffi; everything else stands in pyproject.toml."""

from setuptools import setup

setup(
    cffi_modules=[
        "transport/build_ucx.py:ffi",
        "tiers/build_host.py:ffi",
        "ucxkv/directory/build_slots.py:ffi",
    ],
)
