"""The style of the page: one sheet, light and dark, from phones to wide screens."""

from __future__ import annotations

# Every text colour keeps a contrast of at least 4.5 on both backgrounds of its scheme. The heats grow only darker
# (on dark pages: lighter), so that they can be told apart without hues; numbers stand on them in ink, then in page.
LIGHT = """
  --page: #fbfbf9; --panel: #ffffff; --ink: #1c2126; --muted: #59626d; --line: #e2e4e3; --fill: #eff1f0;
  --pro: #0a6b70; --opp: #a8471a; --alarm: #9b2743; --accent: #3554a4;
  --tone-0: #3554a4; --tone-1: #c07a1e; --tone-2: #2b8a7e;
  --tone-3: #a8476f; --tone-4: #6f8f2c; --tone-5: #7a5fae;
  --heat-0: #f5f7d4; --heat-1: #cae3b7; --heat-2: #9bd0a6; --heat-3: #6bbb9e; --heat-4: #33a499;
  --heat-5: #007d88; --heat-6: #006787; --heat-7: #004e7f; --heat-8: #00366f; --heat-9: #122056;
"""
DARK = """
  --page: #131619; --panel: #1b1f23; --ink: #e6e9ec; --muted: #a1aab4; --line: #2f353b; --fill: #262b30;
  --pro: #55c4c6; --opp: #f0a071; --alarm: #f28aa3; --accent: #94adf2;
  --tone-0: #7f9cea; --tone-1: #e0a450; --tone-2: #52b8aa;
  --tone-3: #dc82a9; --tone-4: #a3c25c; --tone-5: #ac93e0;
  --heat-0: #262445; --heat-1: #233264; --heat-2: #01457c; --heat-3: #005b88; --heat-4: #007187;
  --heat-5: #009c97; --heat-6: #39b591; --heat-7: #76cb85; --heat-8: #b4dd74; --heat-9: #f4ea68;
"""

_BASE = """
* { box-sizing: border-box; }
html { scroll-behavior: smooth; scroll-padding-top: 4rem; -webkit-text-size-adjust: 100%; }
body {
  margin: 0; background: var(--page); color: var(--ink); font: 1rem/1.55 system-ui, sans-serif;
  font-variant-numeric: tabular-nums; overflow-wrap: break-word;
}
main, .masthead, .contents ul { max-width: 76rem; margin: 0 auto; padding-left: 2rem; padding-right: 2rem; }
h1, h2, h3, h4, h5, p, figure, ol, ul, dl, dd { margin: 0; padding: 0; }
h1, h2, h3 { line-height: 1.2; letter-spacing: -0.015em; text-wrap: balance; }
h1 { font-size: clamp(1.9rem, 1.4rem + 2.2vw, 3rem); font-weight: 650; }
h2 { font-size: 1.6rem; font-weight: 640; }
h3 { font-size: 1.05rem; font-weight: 620; }
h4 { font-size: 0.95rem; font-weight: 620; }
h5 { font-size: 0.8rem; font-weight: 600; }
ol, ul { list-style: none; }
a { color: inherit; }
code, pre { font: 0.875em/1.5 ui-monospace, monospace; overflow-wrap: anywhere; }
:focus-visible { outline: 2px solid var(--accent); outline-offset: 3px; border-radius: 4px; }
.sr, .thumb .word, .strip .word, .facts .word {
  position: absolute; width: 1px; height: 1px; margin: -1px; overflow: hidden; clip-path: inset(50%);
  white-space: nowrap;
}
.faint, .note, figcaption { color: var(--muted); }
.note, figcaption { font-size: 0.875rem; }
.lead { max-width: 46rem; margin-top: 0.6rem; color: var(--muted); }
.pro { --tone: var(--pro); } .opp { --tone: var(--opp); }
.high { --tone: var(--ink); } .low { --tone: var(--muted); }
.high .bar, .low .bar { --tone: var(--accent); }
.skip { position: absolute; left: -99rem; }
.skip:focus { left: 1rem; top: 1rem; z-index: 3; padding: 0.5rem 1rem; background: var(--panel); }
"""

_FRAME = """
.contents {
  position: sticky; top: 0; z-index: 2; border-bottom: 1px solid var(--line);
  background: color-mix(in srgb, var(--page) 88%, transparent); backdrop-filter: blur(10px);
}
.contents ul { display: flex; gap: 1.5rem; overflow-x: auto; scrollbar-width: none; white-space: nowrap; }
.contents a {
  display: block; padding: 0.8rem 0; font-size: 0.875rem; color: var(--muted);
  text-decoration: none;
}
.contents a:hover { color: var(--ink); text-decoration: underline; text-underline-offset: 0.4em; }
.contents .brand { margin-right: auto; } .contents .brand a { color: var(--ink); font-weight: 650; }
.masthead { padding-top: 4.5rem; padding-bottom: 1rem; }
.subtitle { max-width: 44rem; margin-top: 1rem; font-size: 1.15rem; color: var(--muted); text-wrap: pretty; }
.cards {
  display: grid; grid-template-columns: repeat(auto-fit, minmax(11rem, 16.5rem)); gap: 1.5rem 2rem;
  margin-top: 3rem;
}
.cards > div { padding-top: 0.9rem; border-top: 2px solid var(--ink); }
.cards dt { font-size: 0.875rem; color: var(--muted); }
.cards .value { font-size: 1.9rem; font-weight: 620; line-height: 1.3; letter-spacing: -0.02em; }
main > section { padding-top: 5rem; }
main > section:last-child { padding-bottom: 6rem; }
.reading-help, .warnings {
  margin-top: 3.5rem; padding: 1.5rem 1.75rem; border-radius: 12px; background: var(--fill);
  max-width: 62rem;
}
.reading-help h2, .warnings h2 { font-size: 1rem; letter-spacing: 0; }
.reading-help p, .warnings p { margin-top: 0.4rem; text-wrap: pretty; }
.reading-help strong { color: var(--tone); font-weight: 620; white-space: nowrap; }
.warnings { border-left: 4px solid var(--alarm); }
.warnings ul { margin: 0.4rem 0 0; padding-left: 1.2rem; } .warnings li + li { margin-top: 0.4rem; }
.legend, .blocks, .strip { display: flex; flex-wrap: wrap; gap: 0.5rem 1.5rem; }
.legend { margin-top: 1rem; font-size: 0.875rem; color: var(--muted); }
.legend .mark { margin-right: 0.5rem; } .legend .word { display: none; }
.pair {
  display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 24rem), 1fr));
  gap: 2.5rem 4rem; margin-top: 2.5rem;
}
.pair .data, .fold .data { max-width: 44rem; } .pair th:first-child, .fold th:first-child { width: 3.5rem; }
.pair h3 { margin-bottom: 0.8rem; }
.scroll { overflow-x: auto; }
.fold { margin-top: 1.5rem; }
summary { cursor: pointer; }
.fold > summary { width: fit-content; color: var(--muted); }
.fold > summary:hover { color: var(--ink); }
"""

_EXAMPLES = """
.strip { gap: 0.6rem; margin-top: 1.5rem; }
.strip a {
  position: relative; display: block; padding: 3px; border: 1px solid var(--line);
  border-radius: 8px; background: var(--panel); text-decoration: none;
}
.strip a:hover { border-color: var(--muted); }
.strip .picture { width: 48px; height: 48px; }
.strip .id { padding: 0 1.6rem 0 0.5rem; font-size: 0.875rem; }
.strip .mark { position: absolute; right: -5px; bottom: -5px; }
.query {
  display: grid; grid-template-columns: 9.5rem minmax(0, 1fr); gap: 1.5rem 3rem; margin-top: 2.5rem;
  padding-top: 2rem; border-top: 1px solid var(--line);
}
.query.kind-text { grid-template-columns: minmax(0, 17rem) minmax(0, 1fr); gap: 1.5rem 2.5rem; }
.asked { position: sticky; top: 4.5rem; align-self: start; }
.asked .frame, .asked .passage { margin-top: 0.9rem; }
.asked .note { margin-top: 0.9rem; }
.prompt { margin-top: 0.9rem; } .asked .prompt .passage { margin-top: 0.1rem; }
.facts { margin-top: 0.9rem; }
.facts > div {
  display: flex; flex-wrap: wrap; align-items: baseline; justify-content: space-between;
  gap: 0 0.75rem; padding: 0.25rem 0;
}
.facts dt { font-size: 0.875rem; color: var(--muted); }
.facts dd { font-weight: 620; } .facts .mark { margin-left: 0.4rem; }
.rows { display: grid; gap: 1.75rem; align-content: start; }
.kind-text .beside { grid-template-columns: repeat(auto-fit, minmax(min(100%, 20rem), 1fr)); gap: 2rem 2.5rem; }
.kind-text .beside .sides { grid-template-columns: minmax(0, 1fr); gap: 1.5rem; }
.kind-text .beside .row { display: grid; grid-template-rows: subgrid; grid-row: span 2; gap: 0; }
.switches { display: flex; flex-wrap: wrap; gap: 0.4rem 2rem; margin-top: 1.2rem; }
.switches label { cursor: pointer; } .switches .note { margin-left: 0.5rem; }
.switches input { accent-color: var(--accent); }
#queries:not(:has(#show-baseline-0:checked)) .baseline-0 { display: none; }
#queries:not(:has(#show-baseline-1:checked)) .baseline-1 { display: none; }
main:has(.switch:checked) { max-width: 94rem; }
#queries:has(.switch:checked) .kind-text .compared {
  grid-template-columns: repeat(auto-fit, minmax(min(100%, 14.5rem), 1fr)); gap: 2rem 2.2rem;
}
#queries:has(.switch:checked) .compared .sides { grid-template-columns: minmax(0, 1fr); gap: 1.5rem; }
#queries:has(.switch:checked) .kind-text .compared .row {
  display: grid; grid-template-rows: subgrid; grid-row: span 2; gap: 0;
}
.row-head { display: flex; flex-wrap: wrap; align-items: baseline; gap: 0 1rem; }
.sides {
  display: grid; grid-template-columns: repeat(2, minmax(0, 1fr)); gap: 1rem 2.5rem;
  margin-top: 0.5rem;
}
.side h5 { margin-bottom: 0.5rem; color: var(--tone); }
.picture {
  display: block; width: 100%; aspect-ratio: 1; height: auto; object-fit: contain;
  border-radius: 6px; background: var(--fill);
}
.crisp { image-rendering: pixelated; }
.missing {
  display: grid; place-items: center; padding: 0.3rem; font-size: 0.8rem; color: var(--muted);
  overflow: hidden; overflow-wrap: anywhere;
}
.frame { position: relative; display: block; }
.examples.as-image { display: grid; grid-template-columns: repeat(5, minmax(0, 1fr)); gap: 0.9rem 0.6rem; }
.label { font-weight: 620; overflow-wrap: anywhere; }
.label s { font-weight: 400; color: var(--muted); } .label b { font-weight: inherit; }
.score { color: var(--muted); white-space: nowrap; }
.bar { display: block; height: 4px; border-radius: 2px; background: var(--fill); overflow: hidden; }
.bar i { display: block; height: 100%; border-radius: 2px; background: var(--tone, var(--accent)); }
.thumb .about { display: grid; padding-top: 0.3rem; font-size: 0.8rem; line-height: 1.35; }
.thumb .label { display: -webkit-box; -webkit-box-orient: vertical; -webkit-line-clamp: 2; overflow: hidden; }
.caption { color: var(--muted); overflow-wrap: anywhere; }
.thumb .caption {
  display: -webkit-box; -webkit-box-orient: vertical; -webkit-line-clamp: 2; overflow: hidden;
  min-height: 2.7em; line-height: 1.35;
}
.thumb .bar { margin-top: 0.25rem; }
.mark {
  display: inline-flex; align-items: center; gap: 0.3rem; font-size: 0.8rem; font-weight: 400;
  color: var(--muted); white-space: nowrap;
}
.sign {
  display: inline-grid; place-items: center; width: 1.15rem; height: 1.15rem; border-radius: 50%;
  background: var(--ink); color: var(--page); font-size: 0.75rem; font-weight: 700; line-height: 1;
}
.mislabelled .sign, .wrong .sign { background: var(--alarm); }
.right .sign, .mark.hit .sign { background: var(--pro); }
.miss .sign { background: var(--muted); } .known .sign { background: var(--accent); }
.thumb .marks { position: absolute; top: -5px; right: -5px; display: flex; gap: 2px; }
.thumb .sign { box-shadow: 0 0 0 2px var(--page); }
.value { display: flex; align-items: center; gap: 0 0.8rem; } .thumb .value { display: grid; }
.plain .about {
  display: grid; grid-template-columns: minmax(4.5rem, auto) minmax(0, 1fr) auto;
  align-items: center; gap: 0 1rem;
}
.plain .bar, .reading .bar { width: 4rem; } .plain .score { min-width: 5rem; text-align: right; }
.plain { padding: 0.45rem 0; border-bottom: 1px solid var(--line); font-size: 0.9rem; }
.what, .what .marks { display: flex; flex-wrap: wrap; align-items: center; gap: 0 0.8rem; }
.reading { padding: 0.8rem 0; border-bottom: 1px solid var(--line); }
.reading .about {
  display: flex; flex-wrap: wrap; align-items: center; gap: 0.1rem 0.8rem; font-size: 0.8rem;
}
.reading .value { margin-left: auto; }
.id { color: var(--muted); overflow-wrap: anywhere; }
.reading .picture { width: 96px; margin-top: 0.5rem; }
.passage {
  margin-top: 0.35rem; font-size: 0.925rem; line-height: 1.55; white-space: pre-wrap;
  overflow-wrap: anywhere;
}
.t { border-radius: 2px; background: color-mix(in srgb, var(--tone) var(--shade), transparent); }
.t.plus { --tone: var(--pro); } .t.minus { --tone: var(--opp); text-decoration-style: dotted; }
.l1 { --shade: 12%; } .l2 { --shade: 20%; } .l3 { --shade: 29%; } .l4 { --shade: 37%; } .l5 { --shade: 46%; }
.l4, .l5 { text-decoration-line: underline; text-decoration-thickness: 2px; text-underline-offset: 0.2em; }
.scale { white-space: pre; } .scale + .scale { margin-left: 2px; }
.passage summary { list-style: none; } .passage summary::-webkit-details-marker { display: none; }
.more { margin-left: 0.3rem; color: var(--accent); font-size: 0.85em; white-space: nowrap; }
.passage[open] .more { display: none; }
.passage[open] summary, .passage::details-content, .rest { display: inline; }
.detect {
  display: grid; grid-template-columns: minmax(0, 23rem) minmax(0, 1fr); gap: 2.5rem 4rem;
  margin-top: 2rem;
}
.roc { position: sticky; top: 4.5rem; align-self: start; }
.detect .legend { margin: 0 0 1.2rem; }
.wall.as-image { grid-template-columns: repeat(auto-fill, minmax(3.9rem, 1fr)); gap: 1.1rem 0.8rem; }
.wall .miss .frame { outline: 2px dashed var(--muted); outline-offset: 2px; border-radius: 6px; }
.wall.as-id, .wall.as-text { max-width: 48rem; margin-top: 1.5rem; }
.wall .bar { --tone: var(--accent); }
.wall.cards-of.as-image { grid-template-columns: repeat(auto-fill, minmax(min(100%, 17.5rem), 1fr)); gap: 1.6rem 2rem; }
.wall.cards-of { margin-top: 2rem; } .legend + .wall.cards-of { margin-top: 0; }
.cards-of .thumb { display: grid; grid-template-columns: 6rem minmax(0, 1fr); gap: 0 1rem; align-items: start; }
.cards-of .thumb .about { padding-top: 0; align-content: start; font-size: 0.85rem; }
.cards-of .thumb .value { display: flex; } .cards-of .thumb .bar { flex: 1; margin-top: 0; }
.said { margin-top: 0.3rem; } .said > div { padding: 0.1rem 0; justify-content: flex-start; }
.said dt { width: 5.6rem; font-size: inherit; } .said dd { flex: 1; font-weight: 400; overflow-wrap: anywhere; }
.said > div:first-child dd, .said .other dd { font-weight: 620; } .said .other dd { color: var(--alarm); }
.reading .said, .plain .said { font-size: 0.85rem; max-width: 40rem; }
.pictures { position: absolute; }
"""

_PLOTS = """
svg.plot { display: block; max-width: none; overflow: visible; }
.settings-strip .setting { fill: var(--muted); opacity: 0.6; }
.settings-strip .setting.chosen { fill: var(--accent); opacity: 1; }
.settings-strip .whisker, .settings-strip .ceiling { stroke: var(--ink); stroke-width: 1.5; }
.settings-strip .expected { fill: var(--ink); }
.settings-strip line.baseline { stroke: var(--ink); stroke-dasharray: 4 4; opacity: 0.6; }
.settings-strip .label { font-size: 12px; fill: var(--ink); }
.settings-strip text.ceiling { stroke: none; }
svg.lines { width: 100%; max-width: 30rem; height: auto; }
figure.scroll { margin-top: 2rem; padding-bottom: 0.5rem; }
svg text { font-size: 11px; fill: var(--muted); }
.axis-label, .above { font-size: 12px; }
.above { fill: var(--ink); font-weight: 650; }
.grid { stroke: var(--line); stroke-width: 1; } .axis, .divider { stroke: var(--line); stroke-width: 1; }
.reference { stroke: var(--ink); stroke-width: 1; stroke-dasharray: 5 4; }
.reference-label { fill: var(--ink); }
.hover { fill: transparent; } .bar-group:hover .hover { fill: var(--fill); }
.bar-group:hover .bar-label { fill: var(--ink); }
.tone-0 { fill: var(--tone-0); background: var(--tone-0); }
.tone-1 { fill: var(--tone-1); background: var(--tone-1); }
.tone-2 { fill: var(--tone-2); background: var(--tone-2); }
.tone-3 { fill: var(--tone-3); background: var(--tone-3); }
.tone-4 { fill: var(--tone-4); background: var(--tone-4); }
.tone-5 { fill: var(--tone-5); background: var(--tone-5); }
.swatch { display: inline-block; width: 0.75rem; height: 0.75rem; margin-right: 0.45rem; border-radius: 3px; }
.blocks { gap: 0.25rem 1.4rem; margin-top: 0.3rem; font-size: 0.875rem; }
.key-line { margin-top: 1.2rem; }
.sets {
  display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 33.75rem), 1fr));
  gap: 3rem 2.5rem; margin-top: 2rem;
}
.weight-set { min-width: 0; } .weight-set .note { margin-top: 0.3rem; }
.weight-set figure.scroll { margin-top: 1rem; } .weight-set .fold { margin-top: 0.6rem; }
.weight-set .pair { margin-top: 1rem; }
.maps { display: flex; flex-wrap: wrap; gap: 2rem 1.5rem; margin-top: 1rem; }
.maps figure.scroll { max-width: 100%; margin-top: 0; } .maps figcaption { margin-top: 0.4rem; }
.heat-panel { margin-top: 2rem; } .heat-panel h3 + .note { margin-top: 0.3rem; }
.heat-panel + .heat-panel { margin-top: 4rem; }
.heat-scale .shades { display: inline-flex; gap: 1px; vertical-align: -0.1em; margin: 0 0.4rem; }
.heat-scale i { width: 1.1rem; height: 0.8rem; } .heat-scale { margin-top: 0.5rem; }
.cell-label, .none { fill: var(--muted); } .cool { fill: var(--ink); } .hot { fill: var(--page); }
.heat-0 { fill: var(--heat-0); background: var(--heat-0); }
.heat-1 { fill: var(--heat-1); background: var(--heat-1); }
.heat-2 { fill: var(--heat-2); background: var(--heat-2); }
.heat-3 { fill: var(--heat-3); background: var(--heat-3); }
.heat-4 { fill: var(--heat-4); background: var(--heat-4); }
.heat-5 { fill: var(--heat-5); background: var(--heat-5); }
.heat-6 { fill: var(--heat-6); background: var(--heat-6); }
.heat-7 { fill: var(--heat-7); background: var(--heat-7); }
.heat-8 { fill: var(--heat-8); background: var(--heat-8); }
.heat-9 { fill: var(--heat-9); background: var(--heat-9); }
.curve { fill: none; stroke-width: 2; stroke-linejoin: round; stroke-linecap: round; }
.line-0 { stroke: var(--muted); stroke-dasharray: 6 4; } .line-1 { stroke: var(--accent); stroke-width: 2.5; }
.line-2 { stroke: var(--opp); stroke-dasharray: 2 4; }
.lines .curve:only-of-type { stroke: var(--accent); stroke-dasharray: none; } .dot { fill: var(--accent); }
.band { opacity: 0.14; } .band-0 { fill: var(--muted); } .band-1 { fill: var(--accent); } .band-2 { fill: var(--opp); }
.lines .band:only-of-type { fill: var(--accent); }
.diagonal { stroke: var(--muted); stroke-width: 1; stroke-dasharray: 1 4; }
.areas { display: grid; gap: 0.1rem; margin: 0.8rem 0 0.6rem; color: var(--ink); font-size: 1rem; }
.areas > div { display: flex; justify-content: space-between; gap: 1rem; max-width: 20rem; }
.trust figure { max-width: 30rem; } .trust .pair { align-items: start; }
.trust .results { margin-top: 0; min-width: 0; }
.areas dd { font-weight: 620; } .key { margin-right: 0.6rem; vertical-align: middle; }
"""

_TABLES = """
.data { border-collapse: collapse; width: 100%; font-size: 0.925rem; }
.data th, .data td {
  padding: 0.45rem 1rem 0.45rem 0; border-bottom: 1px solid var(--line); text-align: left;
  vertical-align: middle; font-weight: 400;
}
.data thead th { font-size: 0.8rem; color: var(--muted); white-space: nowrap; }
.data .number { text-align: right; white-space: nowrap; }
.data .meter { width: 26%; min-width: 4rem; padding-right: 0; }
.data caption { padding-bottom: 0.6rem; text-align: left; font-size: 1.05rem; font-weight: 620; }
.results { width: auto; min-width: min(100%, 32rem); margin-top: 2rem; }
.results td.number, .results th.number { padding-left: 1.5rem; }
.highlight > * { font-weight: 650 !important; }
.results + .note { margin-top: 0.6rem; max-width: 46rem; }
.steps { display: grid; gap: 0.9rem; max-width: 46rem; margin-top: 1.5rem; }
.steps li { display: grid; grid-template-columns: 1fr auto; gap: 0.15rem 1rem; }
.steps .bar { grid-column: 1 / -1; height: 6px; } .steps .note { grid-column: 1 / -1; }
.step-time { color: var(--muted); }
.provenance { display: grid; gap: 0.6rem; margin-top: 1rem; }
.provenance > div { display: grid; grid-template-columns: 12rem minmax(0, 1fr); gap: 0.2rem 1.5rem; }
.provenance dt { color: var(--muted); }
.provenance pre { margin: 0; white-space: pre-wrap; }
"""

_SCREENS = """
@media (max-width: 62rem) {
  .detect { grid-template-columns: minmax(0, 1fr); }
  .roc, .kind-text .asked { position: static; }
  .query.kind-text { grid-template-columns: minmax(0, 1fr); }
  .kind-image .sides { grid-template-columns: minmax(0, 1fr); }
}
@media (max-width: 44rem) {
  main, .masthead, .contents ul { padding-left: 1.1rem; padding-right: 1.1rem; }
  .masthead { padding-top: 2.5rem; }
  main > section { padding-top: 3.5rem; }
  .cards { grid-template-columns: repeat(2, minmax(0, 1fr)); gap: 1.2rem; margin-top: 2rem; }
  .cards .value { font-size: 1.5rem; }
  .asked { position: static; }
  .kind-image .asked { display: grid; grid-template-columns: 8rem minmax(0, 1fr); gap: 0 1.5rem; }
  .kind-image .asked > * { grid-column: 1 / -1; } .kind-image .asked .frame { grid-column: 1; }
  .kind-image .asked .facts { grid-column: 2; align-self: center; }
  .data .meter, .data thead td { display: none; }
  .query, .sides { grid-template-columns: minmax(0, 1fr); }
  .facts { max-width: 16rem; }
  .thumb .about { font-size: 0.75rem; }
  .provenance > div { grid-template-columns: minmax(0, 1fr); }
}
@media (prefers-reduced-motion: reduce) { html { scroll-behavior: auto; } }
@media print { .contents, .strip { display: none; } .query { break-inside: avoid; } }
"""

CSS = (
    f":root {{ color-scheme: light dark; {LIGHT} }}\n"
    f"@media (prefers-color-scheme: dark) {{ :root {{ {DARK} }} }}\n"
    f"{_BASE}{_FRAME}{_EXAMPLES}{_PLOTS}{_TABLES}{_SCREENS}"
)
