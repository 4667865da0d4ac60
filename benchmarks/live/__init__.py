"""The same requests live, through ``kvrouter up`` and HTTP, and replayed: choices and times of both."""
