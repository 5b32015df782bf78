// The theme, before anything is drawn: the chosen one, or the device's. This isn't a module, as modules run too late.
(() => {
  const device = matchMedia("(prefers-color-scheme: dark)");
  let chosen = null;
  try {
    chosen = localStorage.getItem("lastbit.theme");
  } catch {
    // This browser keeps nothing for the page.
  }

  function apply() {
    const isDark = chosen === "dark" || (chosen !== "light" && device.matches);
    document.documentElement.dataset.theme = isDark ? "dark" : "light";
    document.querySelector("meta[name='theme-color']").content = isDark ? "#131512" : "#fbfaf7";
    dispatchEvent(new Event("theme"));
  }

  device.addEventListener("change", apply);
  addEventListener("preference", ({ detail }) => {
    chosen = detail.theme;
    apply();
  });
  apply();
})();
