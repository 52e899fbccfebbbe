"""The command line: each sub-command parses its words, resolves its settings and calls one function of another room.

`main` picks a sub-command and turns errors into exit codes; a sub-command's module is imported only when it is used, so
help pages and the list of models appear at once.
"""
