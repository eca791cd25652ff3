(async () => {
  const nonce = document.currentScript.nonce;
  const packed = document.getElementById('plotly-gz');
  if (!packed || !('DecompressionStream' in window)) return;
  const bytes = Uint8Array.from(atob(packed.textContent.trim()), (c) => c.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream('gzip'));
  const code = await new Response(stream).text();
  const define = window.define; window.define = undefined;  // no AMD loader may swallow it
  const script = document.createElement('script'); script.textContent = code; script.nonce = nonce;
  document.head.appendChild(script); window.define = define;
  const dark = window.matchMedia('(prefers-color-scheme: dark)').matches;
  const draw = (box) => {
    const source = box.querySelector('script[type="application/json"]');
    const canvas = box.querySelector('.canvas');
    if (!source || box.dataset.drawn) return;
    const figure = JSON.parse(source.textContent);
    if (figure.layout.xaxis2 && canvas.clientWidth < 720) return;  // a grid of plots on a phone: the image shrinks better
    box.dataset.drawn = '1';
    const layout = Object.assign({}, figure.layout, {autosize: true});
    delete layout.width;
    layout.font = Object.assign({}, layout.font, {color: dark ? '#b8b8b8' : '#4a4a4a'});
    const place = document.createElement('div');
    const options = {responsive: true, displaylogo: false, displayModeBar: false};
    canvas.style.minHeight = (layout.height || 300) + 'px';
    canvas.replaceChildren(place);
    window.Plotly.newPlot(place, figure.data, layout, options);
  };
  const boxes = document.querySelectorAll('figure.plot');
  if (!('IntersectionObserver' in window)) { boxes.forEach(draw); return; }
  const watcher = new IntersectionObserver((entries) => entries.forEach((entry) => {
    if (entry.isIntersecting) { watcher.unobserve(entry.target); draw(entry.target); }
  }), {rootMargin: '400px'});
  boxes.forEach((box) => watcher.observe(box));
  window.addEventListener('beforeprint', () => boxes.forEach(draw));
})();
