"""Small teachers that ship with the package: one folder each, a safetensors file and its model card."""
