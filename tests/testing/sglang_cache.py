"""How tests empty the cache of an SGLang server."""

import httpx

from tests.testing.processes import eventually


async def flush_cache(http: httpx.AsyncClient) -> None:
    """Return once the cache is empty: the server answers 400 while a request is there, and just after."""

    async def is_flushed() -> bool:
        answer = await http.post("/flush_cache")
        if answer.status_code == httpx.codes.BAD_REQUEST:
            return False
        answer.raise_for_status()
        return True

    await eventually(is_flushed)
