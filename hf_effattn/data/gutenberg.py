"""Books of Project Gutenberg: where the book itself begins and ends in their files."""

import re

# What stands around a book; the book is the group.
GUTENBERG = re.compile(r"\*\*\* ?START OF[^\n]*\n(.*?)\*\*\* ?END OF", re.DOTALL)
