"""How a release is packed and judged: the wheel, the source distribution, their checksums."""
