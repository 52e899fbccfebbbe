"""The CPU kernels: C sources, how they are compiled, and the library as Python sees it.

`build` compiles (it needs nothing but the standard library, because it also runs while Bough is being installed),
`library` finds and opens what was compiled. What the operations mean is said in `bough/kernels`; who calls them, in
`bough/executor`.
"""
