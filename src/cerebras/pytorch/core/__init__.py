"""The engine: capture of a step, the program it becomes, its compilation and its execution.

Nothing outside this package touches a private torch interface; `docs/architecture.md` lists those used here.
"""
