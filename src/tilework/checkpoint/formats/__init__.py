"""Bridges to other formats: each is read as a source, and written from any source.

- ``source``: tensors by regions, in any format; safetensors files; files of torch.save;
- ``dcp``: folders of torch.distributed.checkpoint;
- ``converting``: detection of formats, and ``convert``.
"""
