"""The playground: a page that shows how an answer is denoised, and the routes that it uses."""
