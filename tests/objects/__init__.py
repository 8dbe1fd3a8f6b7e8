"""Tests of ucxkv.objects."""
