"""Reports: number formats, charts, the HTML page, model cards and terminal tables."""
