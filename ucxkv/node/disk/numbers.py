"""The numbers of a disk tier that is not there; apart, so that a node without one loads nothing of it."""

from __future__ import annotations

__all__ = ["NO_DISK"]

NO_DISK = dict.fromkeys(
    (
        "disk_blocks",
        "disk_block_bytes",
        "disk_copies",
        "disk_pending",
        "disk_demoted",
        "disk_promoted",
        "disk_failed",
        "disk_payload_bytes",
        "disk_written_bytes",
        "disk_read_bytes",
        "disk_damaged",
        "disk_files",
        "disk_files_reclaimed",
        "disk_reads",
        "disk_read_failed",
        "disk_codec_in_bytes",
        "disk_codec_out_bytes",
        "disk_codec_declined",
        "disk_decoded_bytes",
        "disk_writes_refused",
        "disk_too_long",
    ),
    0.0,
)
"""What `DiskTier.numbers` has."""
