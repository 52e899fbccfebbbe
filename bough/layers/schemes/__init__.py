"""How the weight of a linear layer is kept and multiplied: plainly, or quantised in one of several ways.

`base` says what layers ask of a scheme, `stored` which there are. A scheme quantises what it is given band by band
while the checkpoint is read, so that a model is never in memory unquantised.
"""
