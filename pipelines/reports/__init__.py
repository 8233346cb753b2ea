"""Reports: formatting of numbers, tables and sentences, charts, the HTML page and model cards."""
