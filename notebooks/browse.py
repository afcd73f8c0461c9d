"""Open pages of the built site in a headless Chromium, offline, and say what is wrong.

    python notebooks/browse.py build/docs all

The second argument is their number: so many, evenly spaced in the order of their paths, or all.
What is wrong: an error on the console, a request that fails or leaves the folder, an image that is
not shown or has no text that stands for it, a formula that is not drawn, a link to a page or a
place in it that there is not, a page wider than a desktop's window or a phone, a first page that
does not fit into a desktop's window, a table, code block or equation that is wider than its place
and does not scroll in a box of its own (on a desktop only a table may scroll), a name in a table
that is broken within a word or, in the first column, at all, a search for one of ``SEARCHED`` whose
first results lack its page. Exits with 1 if there is any such thing, or if all pages are to be
opened and there is no Chromium.
"""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from urllib.parse import unquote, urlparse

from playwright.sync_api import Browser, Page, ViewportSize, sync_playwright

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
LOCAL = ("file:", "data:", "blob:")
DESKTOP: ViewportSize = {"width": 1280, "height": 800}
PHONE: ViewportSize = {"width": 390, "height": 800}
SEARCHED = {
    "FedADMM": "fedadmm",
    "mixed precision": "pages/questions",
    "gradient clipping": "pages/questions",
    "Lightning": "recipes/lightning",
    "Hugging Face": "recipes/trainer",
    "learning rate schedule": "pages/questions",
    "early stopping": "pages/questions",
    "parameter groups": "pages/questions",
    "training loop": "recipes/own-loop",
}
"""What people search for, and the page that answers, which is among the first three results."""
SEARCH_ENDED = "() => !document.querySelector('#search-progress')?.textContent.trim()"
FOUND = """() => ({
    formulas: [...document.querySelectorAll('.math')]
        .filter(e => !e.querySelector('mjx-container')).map(e => e.textContent),
    errors: [...document.querySelectorAll('[data-mml-node=merror], mjx-merror')]
        .map(e => e.getAttribute('data-mjx-error') || e.textContent),
    images: [...document.images].filter(e => !e.naturalWidth).map(e => e.src),
    mute: [...document.images].filter(e => !e.alt).map(e => e.src),
    links: [...document.querySelectorAll('a[href]')].map(e => e.href),
})"""
"""What a page holds."""
WIDE = """() => {
    const overflow = e => getComputedStyle(e).overflowX;
    const found = {cut: [], scrolled: [], width: document.documentElement.scrollWidth};
    for (const e of document.querySelectorAll('table, pre, mjx-container[display="true"]')) {
        const text = `${e.tagName.toLowerCase()} "${e.textContent.trim().slice(0, 40)}"`;
        let box = e.parentElement;
        while (!box.matches('article, body') && overflow(box) === 'visible')
            box = box.parentElement;
        const within = e.getBoundingClientRect().right <= box.getBoundingClientRect().right + 1;
        if (within && (overflow(e) === 'visible' || e.scrollWidth <= e.clientWidth + 1)) continue;
        const scrolls = within || ['auto', 'scroll'].includes(overflow(box));
        (scrolls ? found.scrolled : found.cut).push(text);
    }
    return found;
}"""
"""The tables, code blocks and equations that are wider than their place."""
BROKEN = """() => {
    const found = [];
    for (const e of document.querySelectorAll('td code, th code')) {
        if (e.getClientRects().length < 2) continue;
        const first = e.closest('td, th').cellIndex === 0, letters = first ? /\\S/ : /\\w/;
        const nodes = document.createTreeWalker(e, NodeFilter.SHOW_TEXT), range = new Range();
        let broken = false;
        for (let node = nodes.nextNode(); node; node = nodes.nextNode()) {
            const top = i => {
                range.setStart(node, i);
                range.setEnd(node, i + 1);
                return range.getBoundingClientRect().top;
            };
            const text = node.textContent;
            for (let i = 1; i < text.length && !broken; i++)
                broken = letters.test(text[i - 1]) && letters.test(text[i])
                    && Math.abs(top(i) - top(i - 1)) > 5;
        }
        if (broken) found.push(e.textContent);
    }
    return found;
}"""
"""The names in tables that do not stay whole."""
HOME = "() => document.querySelector('.home + figure')?.getBoundingClientRect().bottom ?? 0"
"""Where the first page ends, of other pages 0."""


@cache
def places(path: Path) -> set[str]:
    """Return the names in a page that a link may lead to."""
    return set(re.findall(r'\bid="([^"]+)"', path.read_text()))


def dead(link: str) -> bool:
    """Whether a link leads to a file, or a place in one, that there is not."""
    url = urlparse(link)
    if url.scheme != "file":
        return False
    path = Path(unquote(url.path))
    if not path.is_file():
        return True
    place = unquote(url.fragment)
    return bool(place) and path.suffix == ".html" and place not in places(path)


def wrong(page: Page, path: Path) -> Iterator[str]:
    """Open a page and yield what is wrong with it."""
    heard: list[str] = []
    page.on("console", lambda m: heard.append(m.text) if m.type == "error" else None)
    page.on("pageerror", lambda error: heard.append(str(error)))
    page.on("requestfailed", lambda request: heard.append(f"not loaded: {request.url}"))
    page.on("request", lambda r: None if r.url.startswith(LOCAL) else heard.append(r.url))
    page.goto(path.as_uri(), wait_until="load")
    page.evaluate("() => window.MathJax && MathJax.startup && MathJax.startup.promise")
    found = page.evaluate(FOUND)
    yield from heard
    yield from (f"formula not drawn: {text}" for text in found["formulas"])
    yield from (f"formula with an error: {text}" for text in found["errors"])
    yield from (f"image not shown: {source}" for source in found["images"])
    yield from (f"image without a text: {source[:80]}" for source in found["mute"])
    yield from (f"dead link: {link}" for link in sorted(set(filter(dead, found["links"]))))
    for size in (PHONE, DESKTOP):
        page.set_viewport_size(size)
        wide = page.evaluate(WIDE)
        where = f"in a window of {size['width']} pixels"
        if wide["width"] > size["width"]:
            yield f"{wide['width']} pixels wide {where}"
        scrolled = [text for text in wide["scrolled"] if not text.startswith("table")]
        for text in [*wide["cut"], *(scrolled if size is DESKTOP else ())]:
            yield f"too wide {where}: {text}"
        yield from (f"broken {where}: {name}" for name in page.evaluate(BROKEN))
    if (end := page.evaluate(HOME)) > DESKTOP["height"]:
        yield f"ends at {end:.0f} pixels, below a desktop's first screen"


def search_finds(browser: Browser, site: Path, word: str, wanted: str) -> bool:
    """Whether the first three pages that the site's search finds for ``word`` have ``wanted``."""
    page = browser.new_page()
    page.goto(f"{(site / 'search.html').as_uri()}?q={word}")
    try:
        page.wait_for_selector("#search-results li a", timeout=20_000)
        page.wait_for_function(SEARCH_ENDED, timeout=20_000)
    except Exception:
        return False
    links = page.eval_on_selector_all("#search-results li a", "found => found.map(a => a.href)")
    pages = list(dict.fromkeys(link.split("#")[0].split("?")[0] for link in links))
    return any(wanted in found for found in pages[:3])


def listed(site: Path) -> list[str]:
    """Return the links of ``llms.txt`` that lead nowhere."""
    path = site / "llms.txt"
    links = re.findall(r"\]\((\S+)\)", path.read_text()) if path.exists() else []
    return [link for link in links if not (site / link).is_file()]


def main(site: Path, number: str) -> int:
    """Open ``number`` pages, or ``all``; return the exit status."""
    program = next(filter(None, map(shutil.which, BROWSERS)), None)
    if program is None:
        print(f"no {' or '.join(BROWSERS)} here: the pages were not opened")
        return int(number == "all")
    pages = [path for path in sorted(site.rglob("*.html")) if "_static" not in path.parts]
    pages = [path for path in pages if path != site / "index.html"]  # which leads to the first page
    if number != "all":
        pages = pages[:: -(-len(pages) // int(number))]
    faults = 0
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program)
        context = browser.new_context(viewport=PHONE, offline=True)
        for path in pages:
            page = context.new_page()
            for fault in wrong(page, path):
                faults += 1
                print(f"{path.relative_to(site)}: {fault}")
            page.close()
        for word, wanted in SEARCHED.items():
            if not search_finds(browser, site, word, wanted):
                faults += 1
                print(f"search.html: {word} does not lead to {wanted}")
        for link in listed(site):
            faults += 1
            print(f"llms.txt: dead link: {link}")
        browser.close()
    print(f"{len(pages)} pages opened, {faults} faults")
    return int(faults > 0)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]).absolute(), sys.argv[2]))
