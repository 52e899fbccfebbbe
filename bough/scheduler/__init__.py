"""Decides what runs next and accounts for what ran. Torch-free: it reaches compute only through `ports`.

Read `loop` for the order of events, `planner` for how a step is decided, `commit` for what happens with its result,
`running_batch` for the rows and pages of running requests.
"""
