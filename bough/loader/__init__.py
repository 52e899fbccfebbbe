"""Finds, fetches and reads models: from the catalogue, the disk or a hub; safetensors, GGUF or random weights.

Two halves. `catalogue`, `fetch` and `locate` say where a model lies, `config` and `gguf_config` what it is; they are
torch-free, so that listing models is instant. `source`, `dequantize` and `load` read tensors. Models
state which part of which tensor they want (`WeightSlot`), families where it stands; nothing here names an architecture.
"""
