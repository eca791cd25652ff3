"""Where text stands on a page: overlapping boxes, and what moved. Run in the page by Playwright."""

from __future__ import annotations

# Every piece of visible text as [left, top, right, bottom, text], cut by what in `root` hides or scrolls what sticks out.
TEXTS = """(root) => {
  const found = [], drawn = new Set(), top = document.querySelector(root);
  const walker = document.createTreeWalker(top, NodeFilter.SHOW_TEXT);
  const clipped = (rect, element) => {
    let [l, t, r, b] = [rect.left, rect.top, rect.right, rect.bottom];
    for (let e = element; e && e !== top.parentElement; e = e.parentElement) {
      if (getComputedStyle(e).overflow !== 'visible') {
        const box = e.getBoundingClientRect();
        l = Math.max(l, box.left); t = Math.max(t, box.top); r = Math.min(r, box.right); b = Math.min(b, box.bottom);
      }
    }
    return [l, t, r, b];
  };
  for (let node = walker.nextNode(); node; node = walker.nextNode()) {
    const text = node.textContent.trim(), parent = node.parentElement.closest('text') || node.parentElement;
    if (!text || ['SCRIPT', 'STYLE', 'NOSCRIPT'].includes(parent.tagName) || drawn.has(parent)) continue;
    if (!parent.checkVisibility({opacityProperty: true, visibilityProperty: true})) continue;  // a closed <details>, too
    if (parent.tagName === 'text') drawn.add(parent);  // its parts overlap as they should: a power of ten
    const range = document.createRange();
    range.selectNodeContents(node);
    const whole = drawn.has(parent) ? [parent.getBoundingClientRect()] : [...range.getClientRects()];
    for (const rect of whole) {
      const [l, t, r, b] = clipped(rect, parent);
      if (r - l > 1 && b - t > 1) found.push([l, t + scrollY, r, b + scrollY, text.slice(0, 40)]);
    }
  }
  return found;
}"""

# From now on, every element that moved by more than 5 pixels without the user's doing, as a line of text.
WATCH_SHIFTS = """() => {
  window.shifts = [];
  new PerformanceObserver((list) => list.getEntries().forEach((entry) => entry.sources.forEach((source) => {
    const [a, b] = [source.previousRect, source.currentRect];
    const element = source.node instanceof Element ? source.node : source.node && source.node.parentElement;
    if (!element || !element.closest('.jp-Notebook')) return;  // JupyterLab's own status bar moves
    if (!b.width || !b.height || !a.width || !a.height) return;
    const far = Math.max(Math.abs(a.top - b.top), Math.abs(a.left - b.left));
    const name = element.getAttribute('class') || element.nodeName;
    if (far > 5) window.shifts.push(`${name} by ${far.toFixed(0)} px`);
  }))).observe({type: 'layout-shift'});
}"""


def overlaps(texts: list[list], across: float = 2.0, down: float = 4.0) -> list[str]:
    """Pairs of texts whose boxes share more than `across` by `down` pixels. (Line boxes of one paragraph touch.)"""
    texts = sorted(texts, key=lambda item: item[1])
    found = []
    for i, (left, top, right, bottom, text) in enumerate(texts):
        for other in texts[i + 1 :]:
            if other[1] >= bottom - down:
                break
            if min(right, other[2]) - max(left, other[0]) > across and min(bottom, other[3]) - max(top, other[1]) > down:
                found.append(f"{text!r} and {other[4]!r} at ({other[0]:.0f}, {other[1]:.0f})")
    return found
