"""One text patch a fix, independent of the edits in ``vllm_cgfix``; see ``tests.releases.text``.

A module here has the name of the fix's module and a ``PATCHES``: release, to qualified name of
each edited function, to the operations on that function's lines. It holds line numbers and text
of our own, no code of vLLM beyond names.
"""
