"""One text patch a fix, independent of the edits in ``vllm_cgfix``; see ``tests.releases.text``.

A module here has the name of the fix's module and a ``PATCHES``: qualified name of each edited
function, to the releases that have the same text of it, to the operations on its lines. It holds
line numbers and text of our own, no code of vLLM beyond names.
"""
