// A percentage such as 99.95 %. It is 100 only when all is done and 0 only when nothing is, as on the command line.
export function percent(part, whole) {
  if (part >= whole) return "100";
  const share = (100 * part) / whole;
  if (part > 0 && share < 0.01) return "<0.01";
  const digits = share >= 99 || share < 1 ? 2 : share >= 90 || share < 10 ? 1 : 0;
  const scale = 10 ** digits;
  return String(Math.floor((100 * scale * part) / whole) / scale);
}
