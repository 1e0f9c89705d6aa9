"""The engine: scheduler, loop and the Python API.
It must never know who called it: no command line, no server, no benchmark."""
