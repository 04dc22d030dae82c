"""The web page at /ui: three files without data, and the JSON that the page polls."""
