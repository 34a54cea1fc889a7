"""Bridges to other formats: each is read as a source, and written from any.

- ``source``: tensors by regions, whatever they lie in;
- ``safetensors_files``: one file, or Hugging Face's several with an index;
- ``torch_file``: torch.save, read with ``weights_only``;
- ``dcp_folder``: what torch.distributed.checkpoint writes;
- ``converting``: which is which, and ``convert``.
"""
