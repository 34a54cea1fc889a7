"""Bridges to other formats: each is read as a source, and written from any source.

- ``source``: tensors by regions, in any format; safetensors files, one or several with an index;
- ``torch_file``: torch.save, read with ``weights_only``;
- ``dcp``: folders of torch.distributed.checkpoint;
- ``converting``: detection of formats, and ``convert``.
"""
