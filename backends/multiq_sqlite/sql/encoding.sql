SELECT encoding FROM pragma_encoding
