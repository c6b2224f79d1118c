# SPDX-License-Identifier: MIT OR Apache-2.0
"""Writes the golden file of each message that has none yet: `python -m tests.protocol.write_golden`.

A file that exists is never written again, because bytes that were once sent must be readable for as long as their
version is. One file per message and version, in hexadecimal, 32 bytes per line.
"""

from __future__ import annotations

from pathlib import Path

from tests.protocol.samples import golden_messages, to_bytes

FOLDER = Path(__file__).parent / "golden"


def golden_path(version: int, name: str) -> Path:
    return FOLDER / f"v{version}-{name}.hex"


def read_golden(path: Path) -> bytes:
    return bytes.fromhex(path.read_text(encoding="ascii"))


def write_missing() -> list[Path]:
    """Write what is missing and say what that was."""
    FOLDER.mkdir(exist_ok=True)
    written = []
    for version in (1, 2):
        for name, message in golden_messages(version).items():
            path = golden_path(version, name)
            if not path.exists():
                text = to_bytes(message, version).hex()
                path.write_text("\n".join(text[i : i + 64] for i in range(0, len(text), 64)) + "\n", encoding="ascii")
                written.append(path)
    return written


if __name__ == "__main__":
    for path in write_missing():
        print(path.name)
