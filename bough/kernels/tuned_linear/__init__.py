"""Products of many rows with a weight: the vendor's library, by the algorithm that was measured to be fastest.

There is no `reference.py`: the plain product is torch's `linear` itself, with which every choice is compared, in time
and in value, before it is taken. The tests compare each algorithm with the product in float64.
"""
