// Everything of this page is in the element `data`.

(function () {
  const data = JSON.parse(document.getElementById("data").textContent);
  showCurves(data);
  const select = showTide(data);
  showStack(data, (step) => { select(step); document.getElementById("tide").scrollIntoView(); });
  showSamples(data);
  const only = document.getElementById("only-set");
  only.addEventListener("change", () => document.querySelector(".settings").classList.toggle("only", only.checked));
})();
