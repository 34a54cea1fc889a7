"""Helpers for models: names in plans, and replaced functions of torch and of other libraries.

An import replaces the functions (``torch_state_dict``).
"""

from tilework.models import torch_state_dict as _replaced
from tilework.models.local_optimizer import ELEMENTWISE, check_elementwise, is_per_element
from tilework.models.module_plan import (
    check_is_module,
    close_names,
    is_pattern,
    matching_names,
    replace_module,
    split_name,
)
from tilework.models.torch_init import original
