"""The page on a gateway: the server's files, told that a gateway serves them."""

from __future__ import annotations

import asyncio

from tests.fakes.gateways import desk


def test_the_page_is_open_and_knows_that_it_is_a_gateways() -> None:
    async def main() -> None:
        async with desk(api_keys=("k1",), admin_api_key="root") as d:
            async with d.client.get(d.url + "/ui") as response:
                assert response.status == 200 and 'data-of="gateway"' in await response.text()
                assert "default-src 'none'" in response.headers["content-security-policy"]
                assert response.headers["content-type"] == "text/html; charset=utf-8"
            async with d.client.get(d.url + "/ui/app.js") as response:
                assert response.status == 200 and response.headers["content-type"].startswith("text/javascript")
            async with d.client.get(d.url + "/ui/", allow_redirects=False) as response:
                assert response.status == 307 and response.headers["location"] == "../ui"
            assert (await d.get("/ui/nothing.js"))[0] == 404
            assert (await d.get("/workers"))[0] == 401, "what it shows needs the key"

    asyncio.run(main())


def test_disable_ui_takes_it_away() -> None:
    async def main() -> None:
        async with desk(disable_ui=True) as d:
            assert (await d.get("/ui"))[0] == 404 and (await d.get("/ui/app.js"))[0] == 404

    asyncio.run(main())
