// Formulas: pymdownx.arithmatex leaves \(...\) and \[...\], KaTeX draws them.
for (const formula of document.querySelectorAll(".arithmatex")) {
  const text = formula.textContent.trim();
  katex.render(text.slice(2, -2), formula, { displayMode: text.startsWith("\\["), throwOnError: false });
}
