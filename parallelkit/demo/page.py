"""The frame of the demo's report: HTML and styles, with places for what was measured."""

from __future__ import annotations

from string import Template
from typing import Final

PAGE: Final = Template("""\
<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>parallelkit demo</title>
<style>
  :root { color: #1f2933; background: #f5f6f8; font: 16px/1.55 system-ui, sans-serif; }
  body { margin: 0 auto; max-width: 62rem; padding: 2.5rem 1.25rem 4rem; }
  h1 { font-size: 1.9rem; letter-spacing: -0.02em; margin: 0 0 0.25rem; }
  h2 { font-size: 1.2rem; margin: 0 0 0.25rem; }
  p { margin: 0 0 1rem; color: #52606d; max-width: 46rem; }
  section { background: white; border: 1px solid #e1e5ea; border-radius: 10px;
            padding: 1.25rem 1.5rem; margin-top: 1.25rem; }
  .verdict { display: inline-block; border-radius: 999px; padding: 0.3rem 0.9rem;
             font-weight: 600; margin: 0.75rem 0 0; }
  .good { background: #dcf5e7; color: #0b5d38; }
  .bad { background: #fde2e0; color: #8f1d14; }
  .tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(7.5rem, 1fr)); gap: 1rem; }
  .tiles b { display: block; font-size: 1.3rem; font-weight: 650; white-space: nowrap; }
  .tiles span { color: #616e7c; font-size: 0.85rem; }
  .wide { overflow-x: auto; }
  table { border-collapse: collapse; width: 100%; font-size: 0.9rem;
          font-variant-numeric: tabular-nums; }
  th, td { text-align: right; padding: 0.4rem 0.7rem; border-bottom: 1px solid #eceff2;
           white-space: nowrap; }
  th { color: #616e7c; font-weight: 500; }
  th:first-child, td:first-child { text-align: left; padding-left: 0; }
  article { border-top: 1px solid #eceff2; padding-top: 0.9rem; margin-top: 0.9rem; }
  h3 { font-size: 1rem; margin: 0 0 0.4rem; }
  h3 span { color: #616e7c; font-weight: 400; font-size: 0.88rem; margin-left: 0.75rem; }
  pre { margin: 0; font: 0.88rem/1.5 ui-monospace, monospace; white-space: pre-wrap;
        overflow-wrap: anywhere; }
  pre b { color: #2563eb; font-weight: 600; }
  footer { color: #616e7c; font-size: 0.85rem; margin-top: 1.5rem; }
</style>
</head>
<body>
<h1>parallelkit demo</h1>
<p>A small language model was trained on Python's help topics, one character at a time, while
another process held the same model and followed its weights live.</p>
<div class="verdict $verdict_class">$verdict</div>
<section class="tiles">
$tiles</section>
<section>
<h2>Loss</h2>
<p>Each dotted line is a version that the follower took over.</p>
$loss
</section>
<section>
<h2>Transfers</h2>
<p>Where the time of each update went, at the trainer.</p>
$phases
<div class="wide"><table>
<thead><tr><th>version</th><th>step</th><th>held-out loss</th><th>size</th><th>transport</th>
<th>update</th><th>pause</th><th>changed</th><th>$compared</th></tr></thead>
<tbody>
$rows</tbody>
</table></div>
</section>
<section>
<h2>Pauses</h2>
<p>The pause of an update is $pause.</p>
$pauses
</section>
<section>
<h2>What the follower writes</h2>
<p>At each version it continues the prompt, always with the same random numbers.</p>
$samples</section>
<footer>$settings</footer>
</body>
</html>
""")
