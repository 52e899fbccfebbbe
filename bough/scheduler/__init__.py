"""Decides what runs next and accounts for what ran. Torch-free: it reaches compute only through `ports`.

Read `loop` for the order of events, `planner` for how a step is decided, `commit` for what happens with its result,
`batch` for who lives in which row on which pages.
"""
