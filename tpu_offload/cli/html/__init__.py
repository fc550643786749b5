"""The HTML report that `--html` writes: one file, with charts, that needs no network.

`page` renders a page of charts and tables, `charts` makes the charts, and each command has a module that turns its
report, the one of `--json`, into a page.
"""
