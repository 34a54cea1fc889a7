"""Bridges to other formats: each is read as a source, and written from any source.

- ``source``: tensors by regions, in any format;
- ``safetensors_files``: one file, or Hugging Face's several with an index;
- ``torch_file``: torch.save, read with ``weights_only``;
- ``dcp_folder``: folders of torch.distributed.checkpoint;
- ``converting``: detection of formats, and ``convert``.
"""
