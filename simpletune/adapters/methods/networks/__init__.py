"""The networks of hypernetworks, and their files.

| module | purpose |
|---|---|
| ``structure`` | the layers of a network, and the names of their tensors |
| ``network`` | the networks themselves |
| ``files`` | safetensors files, and the ``.pt`` of other tools |
| ``about`` | what ``simpletune inspect`` prints about a file |

May import models and what is below it. adapters, lora and the packages above may import it.
"""
