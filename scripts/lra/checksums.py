"""Checksums of the generated tasks of the Long Range Arena, and how a data set is compared with them."""

import hashlib
from collections.abc import Mapping

import datasets

PREFIX = 200
# SHA-256 of the default output: of all samples of a split, and of its first `PREFIX`.
CHECKSUMS: dict[str, dict[str, tuple[str, str]]] = {
    "listops": {
        "train": (
            "a9549f38576c97c0e26239f1c5b553335cb7313f08f55682f9a53bc3256ae791",
            "d396097d3e64a599afc2eaa3d51f12ef2b5aac55f677d5d847acb72e7025da58",
        ),
        "validation": (
            "39c2271b44fa668b50d467bdfb16ce4cbf5878d4fe8ecf0db8b3bc3cc534b324",
            "df9f458893a39564f4c5e5cdfa86f6e9d28e8d8df68534aed03c1a4443a330a0",
        ),
        "test": (
            "94bb52b42197acf11c1af245878e031f9c6e53730f5920b22abc001c71f43970",
            "5e03f9c3b7df49354b4863a7d6f2e4c76bd6b16b5b50f0415be03897c0456f6e",
        ),
    },
    "pathfinder": {
        "train": (
            "9df6133c262371e9263b3ba6fad205be66e96849dfb4700071f33f3fb1cfb29c",
            "7215898e8bd3e358cbc9e7a37ce131695da69fc184e0026639d6781a8d63e0bc",
        ),
        "validation": (
            "1b6c622d713d1cbf6cdd52bb6c7c625d7a4d65df60a45ffaca235f9dba57926f",
            "07649200215e921730556e569438bc0f2eea38ef154c0853f527ccdb7173ea8d",
        ),
        "test": (
            "de524ddebc16273651cfc113da73f98042d688b547c19fc6155d91cd5c420ada",
            "ffe9d5ad02e89491d066bd381582a73da236302997d0fc7ce567d246af895423",
        ),
    },
}


def lra_checksum(data: datasets.Dataset, count: int | None = None) -> str:
    """SHA-256 of the samples of a split of ListOps or Pathfinder in their order, or of the first so many.

    A sample is its label in one byte, the number of its bytes in four (the lowest first), and these: the text in
    UTF-8, or the pixels.
    """
    digest = hashlib.sha256()
    count = len(data) if count is None else count
    for rows in data.select(range(count)).with_format("numpy").iter(batch_size=500):
        samples = (
            [text.encode() for text in rows["text"]] if "text" in rows else [row.tobytes() for row in rows["pixels"]]
        )
        for label, sample in zip(rows["label"].tolist(), samples, strict=True):
            digest.update(bytes([label]) + len(sample).to_bytes(4, "little") + sample)
    return digest.hexdigest()


def verify_lra(task: str, data: Mapping[str, datasets.Dataset]) -> None:
    """Raise unless a generated task is, sample for sample, the one that everyone has with the default settings.

    Raises:
        ValueError: a task that is not generated, or a split that differs.
    """
    if task not in CHECKSUMS:
        raise ValueError(f"there are checksums of {', '.join(CHECKSUMS)}, not of {task!r}: it is made of other data")
    for split, (expected, _) in CHECKSUMS[task].items():
        checksum = lra_checksum(data[split])
        if checksum != expected:
            raise ValueError(f"{task}, {split}: checksum {checksum}, expected {expected}")
