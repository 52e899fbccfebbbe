"""Images, video and sound on their way into a prompt.

The edge finds an item's bytes (`sources`, `fetching`), has a process decode and prepare them (`worker`, `decoding`,
`families`), and puts what stands for it in the place of its placeholder (`expansion`). `preparer` is all of it.
"""
