"""Pictures, tables and charts, for terminals, notebooks, plain text and SVG files.

A package says what to show as data: a :class:`Page` of lines, a :class:`Picture` of boxes and a
:class:`TextTable`; or the spans of a :func:`timeline`. Layout, colours and escaping are done here.
"""

from tilework.show.page import Bar, Page, Shown, TextTable
from tilework.show.picture import Picture
from tilework.show.svg import Span, timeline
from tilework.show.text import Styled, bytes_text, colour, count_text, printable, run_texts
