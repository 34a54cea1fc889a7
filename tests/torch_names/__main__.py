"""Write the page of what torch has and tilework has not."""

from tests.torch_names.page import PATH, text

PATH.write_text(text())
